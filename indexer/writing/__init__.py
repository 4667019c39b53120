"""Writing of decisions and reservations: a bounded queue, and where they go, a folder (`queue`) or Kafka (`kafka`)."""

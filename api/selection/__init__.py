"""The selection service: which worker gets a request, and what is booked for it. Start at `routes`."""

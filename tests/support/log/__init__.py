"""The reading side of the event log: records made by hand, and a consumer that reads them."""

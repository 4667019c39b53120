"""The event log from the reading side: records made by hand, and a consumer that reads them."""

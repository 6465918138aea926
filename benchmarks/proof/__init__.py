"""How close Carpool comes to the best that can be, and how far ahead of other rules it is: ``make proof``."""

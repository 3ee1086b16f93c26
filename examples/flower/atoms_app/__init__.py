"""A Flower app in which clients share coefficients and keep their filter atoms."""

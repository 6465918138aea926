"""Compares Carpool with the best possible configuration and with other rules: ``make proof``."""

"""The paper: its numbers, its tables as data, reports."""

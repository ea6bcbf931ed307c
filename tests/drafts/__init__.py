"""Tests of the drafters and their trees."""

"""Tests of the engine: cache, law, budget, scheduler, runner and steps."""

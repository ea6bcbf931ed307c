"""Generated from proto/specdec/v1 by `make proto`: do not edit."""

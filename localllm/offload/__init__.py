"""Where bytes rest and how they move. Knows no model."""

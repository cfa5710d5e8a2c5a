"""What things cost: pure arithmetic and pure decisions."""

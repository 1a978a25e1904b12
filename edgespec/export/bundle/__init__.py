"""What a bundle says of a model, and writing it whole or not at all."""

"""What the manifest says of a bundle, measured on its graphs."""

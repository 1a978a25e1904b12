"""Images as a model reads them: files and arrays to pixels."""

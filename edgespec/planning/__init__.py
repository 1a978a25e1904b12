"""What a run will take, in bytes and seconds, before anything is loaded; and what to run within a budget."""

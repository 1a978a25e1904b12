"""Plug-ins that come with edgespec; each is registered by an entry point, and no other module imports them."""

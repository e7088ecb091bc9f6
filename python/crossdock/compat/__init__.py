"""Other libraries' interfaces over Crossdock."""

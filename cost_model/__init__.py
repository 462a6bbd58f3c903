"""How fast a scheduled tensor function will be: features, an analytic roofline, and a model that learns to rank."""

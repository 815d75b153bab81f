"""How a call reaches a plan: the eager route with its plan cache, torch's operators, and the gradients."""

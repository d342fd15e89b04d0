"""Transfer plans: which rank owns which part of the model, and what ranks send to each other."""

"""The race, reproduced on real engines: scenes, a journal of what each page went through, and the picture."""

"""Extensions of the core. Each folder can be deleted: the core finds the remaining folders by its registry."""

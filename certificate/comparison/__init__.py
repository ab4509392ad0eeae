"""Plans and mechanisms side by side: which guarantee is stronger, and what its noise costs."""

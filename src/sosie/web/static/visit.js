// What a view is given, and what it gives back.
export {};

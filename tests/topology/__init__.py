"""Any topology: real gloo ranks save in one layout, load in another, and compare every element with its source."""

"""How strong the tests are: small changes to a module, and whether its tests notice them."""

"""Methods that turn a weight into integers, a file each. `schemes.method` imports every file of this folder."""

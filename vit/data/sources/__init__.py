"""Raw pictures and their classes, in the forms that people have them in; nothing is unpacked."""

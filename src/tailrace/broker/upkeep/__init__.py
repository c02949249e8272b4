"""Care for the machine: scrubs, accepted losses, room on the disk, memory that goes back."""

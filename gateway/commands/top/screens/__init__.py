"""What `warmroute top` draws, with textual. Imported only where there is a terminal, and textual."""

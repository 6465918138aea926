"""Jobs: requests without a waiting caller, stored on disk and run in the time that interactive requests leave."""

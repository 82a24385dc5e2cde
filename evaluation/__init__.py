"""What a policy costs in quality: questions, a client that asks them of servers, and reports."""

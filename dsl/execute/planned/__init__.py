"""What a policy computes, found once per bound policy or prompt length."""

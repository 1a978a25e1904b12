"""How exact any OpenAI-compatible server is: what it is asked, what is compared, and the verdict."""

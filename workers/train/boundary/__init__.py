"""What happens between two steps: report, save, load, leave."""

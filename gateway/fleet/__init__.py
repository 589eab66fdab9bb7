"""The replicas of the gateway: members, health, models, pools."""

"""The RL loop on a Ray cluster: one controller without weights, and actors that hold engines and rollouts.

``train_on_ray`` is the loop of ``engine_trainer.rl.loop`` with another ``Launcher``. Needs the extra ``ray``.
"""

"""The RL loop on a Ray cluster, with a controller without weights and actors that have them.

The actors hold engines and rollouts. ``train_on_ray`` is the loop of ``engine_trainer.rl.loop``
with a different ``Launcher``. Needs the extra ``ray``.
"""

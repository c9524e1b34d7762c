"""Mixed into vLLM's worker by ``--worker-extension-cls``; its methods are called through ``/collective_rpc``."""

from __future__ import annotations

from typing import Any

from grpo_recipes.weights.fingerprint import fingerprint


class WeightReport:
    """What this worker's model holds, for the guard."""

    def grpo_weights(self) -> dict[str, Any]:
        """Fingerprint every parameter.

        Returns:
            ``parameters``: name -> [fingerprint, dtype, copies], tied ones once; ``packed``: fused name -> names of
            its parts, e.g. ``qkv_proj`` -> ``[q_proj, k_proj, v_proj]``.
        """
        model = self.get_model()  # type: ignore[attr-defined]
        parameters = {
            name: [int(fingerprint(parameter.data)), str(parameter.dtype).removeprefix("torch.")]
            for name, parameter in model.named_parameters()
        }
        return {"parameters": parameters, "packed": dict(getattr(model, "packed_modules_mapping", {}))}

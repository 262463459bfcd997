//! Folding of norms' gains into their readers: `W (g * n) = (W diag(g)) n` for every projection `W` that reads a norm's
//! output `g * n`. Includes the norms of Mamba-2 and DeltaNet; DeltaNet's heads share one, and its elementwise gate is
//! unaffected.

use crate::blocks::norm::Norm;
use crate::decoder::Decoder;
use crate::layer::Mixer;
use anec_base::Result;
use anec_source::SourceWeight;

impl Decoder {
    /// Folds the gains of all norms that projections read.
    pub(super) fn fold(&mut self) -> Result<()> {
        for layer in &mut self.layers {
            for block in layer.blocks() {
                let Some(gain) = block.before.and_then(take_gain) else { continue };
                for reader in block.readers {
                    reader.weight = reader.weight.multiply_rows(&gain)?;
                }
            }
            if let Mixer::DeltaNet(net) = &mut layer.mixer
                && let Some(gain) = take_gain(&mut net.norm)
            {
                let of_heads = SourceWeight::concatenate(vec![gain; net.num_value_heads as usize])?;
                net.output.weight = net.output.weight.multiply_rows(&of_heads)?;
            }
            let mamba = match &mut layer.mixer {
                Mixer::Mamba2(mamba) => Some(&mut **mamba),
                Mixer::AttentionAndMamba2(both) => Some(&mut both.1),
                _ => None,
            };
            if let Some(mamba) = mamba
                && let Some(gain) = mamba.norm.as_mut().and_then(take_gain)
            {
                mamba.output.weight = mamba.output.weight.multiply_rows(&gain)?;
            }
        }
        if let Some(gain) = take_gain(&mut self.final_norm) {
            self.head.weight = self.head.weight.multiply_rows(&gain)?;
        }
        Ok(())
    }
}

/// Removes and returns a norm's gain.
pub(super) fn take_gain(norm: &mut Norm) -> Option<SourceWeight> {
    let weight = norm.weight.take()?;
    Some(weight.add(std::mem::replace(&mut norm.offset, 0.0)))
}

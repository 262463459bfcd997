//! Results of the LM head: logits, the largest of them, or both.

use crate::{Bundle, FunctionEntry, Port, PortDim, PortRole};

impl FunctionEntry {
    /// Output of a role.
    pub fn output(&self, role: &PortRole) -> Option<&Port> {
        self.outputs.iter().find(|port| port.role == *role)
    }

    /// Number of the largest logits that are outputs with their rows.
    pub(crate) fn largest_logits(&self) -> Option<u64> {
        self.output(&PortRole::TopIndices)?;
        self.output(&PortRole::TopValues).and_then(|port| port.shape_at(1).get(1).copied())
    }
}

impl Bundle {
    /// Functions that compute rows of the LM head.
    fn head_functions(&self) -> impl Iterator<Item = &FunctionEntry> {
        self.functions.iter().filter(|entry| entry.stage.head_rows().is_some())
    }

    /// Whether the logits of all rows are outputs. True for models without a head.
    pub fn gives_logits(&self) -> bool {
        self.head_functions().all(|entry| entry.output(&PortRole::Logits).is_some())
    }

    /// Number of the largest logits that are outputs with their rows; `None` if they aren't.
    pub fn largest_logits(&self) -> Option<u64> {
        let counts = self.head_functions().map(FunctionEntry::largest_logits);
        counts.collect::<Option<Vec<u64>>>()?.into_iter().max()
    }

    /// The bundle with the logits as outputs that they are inside of its functions. A backend that sees values inside
    /// of functions can run it.
    pub fn with_logits(&self) -> Bundle {
        let mut bundle = self.clone();
        let draft = bundle.draft.iter_mut().flat_map(|draft| &mut draft.functions);
        for entry in bundle.functions.iter_mut().chain(draft) {
            let (Some(name), Some(rows)) = (entry.logits.clone(), entry.stage.head_rows()) else { continue };
            let Some(mut shape) = entry.output(&PortRole::TopValues).map(|port| port.shape.clone()) else { continue };
            if let Some(channels) = shape.get_mut(1) {
                *channels = PortDim::Fixed(rows.end - rows.start);
            }
            entry.outputs.push(Port { name, role: PortRole::Logits, shape });
        }
        bundle
    }
}

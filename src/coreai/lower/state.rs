//! States.

use anec_mil::{Binding, Op, ValueId};

use super::Row;
use super::context::{Lowering, StateValue, Tensor};

pub(super) const ROWS: &[Row] = &[
    ("read_state", |l, op| Ok(vec![l.read_state(op)?])),
    ("write_state", |l, op| l.write_state(op).map(|()| Vec::new())),
];

impl Lowering<'_> {
    /// The token that orders the next read or write of a state.
    pub(super) fn newest_token(&mut self, state: ValueId) -> u32 {
        if let Some(token) = self.states.get(&state).and_then(|state| state.token) {
            return token;
        }
        let ty = self.module.token();
        let token = self.body.op(self.module, "dataflow.create_token_v1", &[], &[], &[ty], Vec::new());
        if let Some(state) = self.states.get_mut(&state) {
            state.token = Some(token);
        }
        token
    }

    fn state(&self, op: &Op) -> Result<(ValueId, StateValue), String> {
        match op.input("input") {
            Some(Binding::Value(id)) => self.states.get(id).map(|state| (*id, state.clone())).ok_or("no state".into()),
            _ => Err("no state".into()),
        }
    }

    /// Reads a state.
    fn read_state(&mut self, op: &Op) -> Result<Tensor, String> {
        let (id, state) = self.state(op)?;
        let token = self.newest_token(id);
        let ty = state.constrained.unwrap_or_else(|| self.ty(&state.ty.shape, state.ty.element));
        let types = [ty, self.module.token()];
        let operands = [state.handle, token];
        let value = self.body.op(self.module, "dataflow.read_handle_v1", &[], &operands, &types, Vec::new());
        let constrained = state.constrained;
        if let Some(state) = self.states.get_mut(&id) {
            state.token = Some(value + 1);
        }
        let read = Tensor { id: value, ..state.ty };
        Ok(if constrained.is_some() { self.unconstrained(&read) } else { read })
    }

    /// Writes a state.
    fn write_state(&mut self, op: &Op) -> Result<(), String> {
        let (id, state) = self.state(op)?;
        let data = self.tensor(op, "data")?;
        let token = self.newest_token(id);
        let ty = self.module.token();
        let data = state.constrained.map_or(data.id, |ty| self.copied_to(&data, ty));
        let operands = [state.handle, data, token];
        let token = self.body.op(self.module, "dataflow.write_handle_v1", &[], &operands, &[ty], Vec::new());
        if let Some(state) = self.states.get_mut(&id) {
            state.token = Some(token);
        }
        Ok(())
    }
}

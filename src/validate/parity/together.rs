//! Runs different divisions into calls side by side, each in its own session. They stay close together, so that
//! products with weights can be shared bit for bit. On backends without shared products they run in sequence, in one
//! session.

use std::sync::Arc;

use super::{CallPlan, Comparison};
use crate::golden::Golden;
use crate::measure::{LogitMeasures, RowMeasures};
use anec_base::Result;
use anec_exec::ProductMemo;
use anec_kernels::dot::MOST_COLUMNS;
use anec_kernels::pool;
use anec_runtime::{Chunking, ForcedPass, ForwardOptions, ForwardPass, Hidden, TokenSession};

/// Maximum lead of a run in tokens: a multiple of most small call sizes.
const MAX_LEAD: usize = 12;
/// Maximum bytes of cached products.
const CACHE_BYTES: usize = 1 << 29;
/// Maximum bytes of states of all sessions.
pub(super) const STATE_BYTES: u64 = 2 << 30;

/// Sessions for the divisions into calls.
pub(super) struct Sessions {
    memo: Arc<ProductMemo>,
    /// One session for each division, or one for all.
    pub(super) own: Vec<TokenSession>,
}

impl Sessions {
    /// Creates `plans` sessions, fewer if their states would take too much memory, or only `first` if products can't be
    /// shared.
    pub(super) fn new(of: &Comparison<'_>, mut first: TokenSession, plans: usize) -> Result<Self> {
        let memo = Arc::new(ProductMemo::new(CACHE_BYTES));
        let shares = first.remember(&memo);
        let most = usize::try_from(of.states / first.state_bytes().max(1)).unwrap_or(plans).min(plans);
        let mut sessions = Sessions { memo, own: vec![first] };
        while shares && sessions.own.len() < most {
            let session = sessions.another(of)?;
            sessions.own.push(session);
        }
        Ok(sessions)
    }

    /// Session of a division.
    pub(super) fn into_session_of(mut self, plan: usize) -> TokenSession {
        let index = plan % self.own.len();
        self.own.swap_remove(index)
    }

    /// New session without any text.
    pub(super) fn another(&self, of: &Comparison<'_>) -> Result<TokenSession> {
        let mut session = of.start()?;
        session.remember(&self.memo);
        Ok(session)
    }

    /// Resets the sessions and runs each division to its end. An error ends only its own run, and its session is
    /// replaced by a valid one.
    pub(super) fn run<R: Run>(
        &mut self,
        of: &Comparison<'_>,
        plans: &[CallPlan],
        begin: impl Fn(usize, &mut TokenSession) -> Result<R>,
    ) -> Result<Vec<Result<R::Output>>> {
        let mut given = Vec::new();
        for plans in plans.chunks(self.own.len()) {
            let first = given.len();
            let member = |(index, session)| {
                let session: &mut TokenSession = session;
                let run = session.reset().and_then(|()| begin(first + index, session));
                Member { session, run, ended: false }
            };
            let mut members: Vec<Member<'_, R>> =
                self.own.iter_mut().take(plans.len()).enumerate().map(member).collect();
            together(&self.memo, &mut members, leader(plans));
            given.extend(members.into_iter().map(|member| member.run.and_then(|run| run.end(member.session))));
            for index in (0..plans.len()).filter(|index| given[first + index].is_err()) {
                self.own[index] = self.another(of)?;
            }
        }
        Ok(given)
    }
}

/// Index of the largest calls that share products; they run first.
fn leader(plans: &[CallPlan]) -> usize {
    let shares = |plan: &CallPlan| matches!(&plan.chunking, Chunking::Pattern(sizes) if !plan.mixed && sizes[0] <= MOST_COLUMNS as u64);
    plans.iter().rposition(shares).unwrap_or(0)
}

/// Run of a text through a session, call by call.
pub(super) trait Run: Send {
    /// Result type.
    type Output;

    /// Number of computed tokens.
    fn done(&self) -> usize;

    /// Computes the next call; returns false if there is none left.
    fn advance(&mut self, session: &mut TokenSession) -> Result<bool>;

    /// Result of the run.
    fn end(self, session: &TokenSession) -> Result<Self::Output>;
}

struct Member<'s, R> {
    session: &'s mut TokenSession,
    run: Result<R>,
    ended: bool,
}

impl<R: Run> Member<'_, R> {
    fn advance_to(&mut self, position: usize) {
        while let Ok(run) = &mut self.run
            && !self.ended
            && run.done() < position
        {
            match run.advance(self.session) {
                Ok(more) => self.ended = !more,
                Err(error) => self.run = Err(error),
            }
        }
    }

    fn next_step(&self) -> Option<usize> {
        self.run.as_ref().ok().filter(|_| !self.ended).map(|run| run.done())
    }
}

/// Runs all members in steps of some tokens: first the leader, then the others, one thread each.
fn together<R: Run>(memo: &ProductMemo, members: &mut [Member<'_, R>], leader: usize) {
    if let [alone] = members {
        return alone.advance_to(usize::MAX);
    }
    while let Some(last) = members.iter().filter_map(Member::next_step).min() {
        memo.forget();
        members[leader].advance_to(last + MAX_LEAD);
        pool::for_each_mut(members, |_, member| member.advance_to(last + MAX_LEAD));
    }
}

/// Run of the golden's text through the whole program.
pub(super) struct WholeRun<'g> {
    golden: &'g Golden,
    pass: ForwardPass<'g>,
    /// Comparisons of the positions computed so far.
    rows: Vec<Option<RowMeasures>>,
    /// Logits of all positions, if requested.
    logits: Option<Vec<f32>>,
}

/// Result of a run through the whole program.
pub(super) struct WholeResult {
    pub(super) measures: LogitMeasures,
    /// Logits of all positions, if requested.
    pub(super) logits: Option<Vec<f32>>,
    pub(super) hidden: Vec<Vec<f32>>,
}

impl<'g> WholeRun<'g> {
    pub(super) fn begin(
        golden: &'g Golden,
        ask: &'g ForwardOptions,
        keeps: bool,
        session: &mut TokenSession,
    ) -> Result<Self> {
        let pass = session.begin(&golden.tokens, ask)?;
        Ok(WholeRun { golden, pass, rows: vec![None; golden.positions.len()], logits: keeps.then(Vec::new) })
    }
}

impl Run for WholeRun<'_> {
    type Output = WholeResult;

    fn done(&self) -> usize {
        self.pass.done()
    }

    fn advance(&mut self, session: &mut TokenSession) -> Result<bool> {
        let (first, width) = (self.pass.done(), self.golden.vocab_size);
        let more = session.advance(&mut self.pass)?;
        let logits = self.pass.take_logits();
        let references = self.golden.logits.chunks_exact(width);
        for ((position, reference), measured) in self.golden.positions.iter().zip(references).zip(&mut self.rows) {
            if (first..self.pass.done()).contains(position) {
                let row = &logits[(position - first) * width..(position + 1 - first) * width];
                *measured = Some(RowMeasures::of(row, reference));
            }
        }
        if let Some(kept) = &mut self.logits {
            kept.extend(logits);
        }
        Ok(more)
    }

    fn end(self, session: &TokenSession) -> Result<WholeResult> {
        let rows: Vec<RowMeasures> = self.rows.into_iter().flatten().collect();
        let hidden = session.finish(self.pass)?.hidden;
        Ok(WholeResult { measures: LogitMeasures::over(&rows), logits: self.logits, hidden })
    }
}

/// Run of some layers on the golden's hidden states.
pub(super) struct ForcedRun<'g>(ForcedPass<'g>);

impl<'g> ForcedRun<'g> {
    pub(super) fn begin(
        part: usize,
        given: &[f32],
        wanted: Hidden,
        chunking: &'g Chunking,
        session: &mut TokenSession,
    ) -> Result<Self> {
        Ok(ForcedRun(session.begin_forced(part, given, wanted, chunking)?))
    }
}

impl Run for ForcedRun<'_> {
    type Output = Vec<Vec<f32>>;

    fn done(&self) -> usize {
        self.0.done()
    }

    fn advance(&mut self, session: &mut TokenSession) -> Result<bool> {
        session.advance_forced(&mut self.0)
    }

    fn end(self, session: &TokenSession) -> Result<Self::Output> {
        session.finish_forced(self.0)
    }
}

//! Ways of calling, tried side by side: each has a session of its own, and goes through the text in its own calls. They keep
//! pace, so that a product with a weight that one of them has computed is at hand when another one needs the same, bit for
//! bit. On backends that can't share products they are tried one after the other, in one session.

use std::sync::Arc;

use super::{Comparison, Way};
use crate::golden::Golden;
use crate::measure::{LogitMeasures, RowMeasures};
use anec_base::Result;
use anec_exec::ProductMemo;
use anec_kernels::dot::MOST_COLUMNS;
use anec_kernels::pool;
use anec_runtime::{Chunking, ForcedPass, ForwardOptions, ForwardPass, Hidden, TokenSession};

/// Tokens that one way may be ahead of another: a multiple of most small calls.
const AHEAD: usize = 12;
/// Most bytes of products that are kept.
const ROOM: usize = 1 << 29;
/// Most bytes of states that sessions have together.
pub(super) const STATES: u64 = 2 << 30;

/// Sessions for ways of calling.
pub(super) struct Sessions {
    memo: Arc<ProductMemo>,
    /// One for each way, or one for all.
    pub(super) own: Vec<TokenSession>,
}

impl Sessions {
    /// As many as `ways`, fewer where their states would take too much memory, or only `first` where products can't be
    /// shared.
    pub(super) fn new(of: &Comparison<'_>, mut first: TokenSession, ways: usize) -> Result<Self> {
        let memo = Arc::new(ProductMemo::new(ROOM));
        let shares = first.remember(&memo);
        let most = usize::try_from(of.states / first.state_bytes().max(1)).unwrap_or(ways).min(ways);
        let mut sessions = Sessions { memo, own: vec![first] };
        while shares && sessions.own.len() < most {
            let session = sessions.another(of)?;
            sessions.own.push(session);
        }
        Ok(sessions)
    }

    /// The session in which a way is run, by its number.
    pub(super) fn into_session_of(mut self, way: usize) -> TokenSession {
        let index = way % self.own.len();
        self.own.swap_remove(index)
    }

    /// A session that no text was computed in.
    pub(super) fn another(&self, of: &Comparison<'_>) -> Result<TokenSession> {
        let mut session = of.start()?;
        session.remember(&self.memo);
        Ok(session)
    }

    /// Begins a run of each way, by its number, in a session that is reset, and takes the runs to their ends. An error ends
    /// only the run that it is of, and its session is replaced by one whose states are whole.
    pub(super) fn run<R: Run>(
        &mut self,
        of: &Comparison<'_>,
        ways: &[Way],
        begin: impl Fn(usize, &mut TokenSession) -> Result<R>,
    ) -> Result<Vec<Result<R::Given>>> {
        let mut given = Vec::new();
        for ways in ways.chunks(self.own.len()) {
            let first = given.len();
            let member = |(index, session)| {
                let session: &mut TokenSession = session;
                let run = session.reset().and_then(|()| begin(first + index, session));
                Member { session, run, ended: false }
            };
            let mut members: Vec<Member<'_, R>> =
                self.own.iter_mut().take(ways.len()).enumerate().map(member).collect();
            together(&self.memo, &mut members, leader(ways));
            given.extend(members.into_iter().map(|member| member.run.and_then(|run| run.end(member.session))));
            for index in (0..ways.len()).filter(|index| given[first + index].is_err()) {
                self.own[index] = self.another(of)?;
            }
        }
        Ok(given)
    }
}

/// The way whose calls are the largest of those that share products: it computes them for the others.
fn leader(ways: &[Way]) -> usize {
    let shares =
        |way: &Way| matches!(&way.chunking, Chunking::Pattern(sizes) if !way.mixed && sizes[0] <= MOST_COLUMNS as u64);
    ways.iter().rposition(shares).unwrap_or(0)
}

/// A text on its way through a session, call by call.
pub(super) trait Run: Send {
    /// What it gives in the end.
    type Given;

    /// Tokens that have been computed.
    fn done(&self) -> usize;

    /// Computes the next call; gives false if there is none left.
    fn advance(&mut self, session: &mut TokenSession) -> Result<bool>;

    /// What it has given.
    fn end(self, session: &TokenSession) -> Result<Self::Given>;
}

struct Member<'s, R> {
    session: &'s mut TokenSession,
    run: Result<R>,
    ended: bool,
}

impl<R: Run> Member<'_, R> {
    fn go_to(&mut self, position: usize) {
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

    fn goes_on(&self) -> Option<usize> {
        self.run.as_ref().ok().filter(|_| !self.ended).map(|run| run.done())
    }
}

/// Takes runs to their ends, some tokens at a time: first the leader, then the others, each on one thread.
fn together<R: Run>(memo: &ProductMemo, members: &mut [Member<'_, R>], leader: usize) {
    if let [alone] = members {
        return alone.go_to(usize::MAX);
    }
    while let Some(last) = members.iter().filter_map(Member::goes_on).min() {
        memo.forget();
        members[leader].go_to(last + AHEAD);
        pool::for_each_mut(members, |_, member| member.go_to(last + AHEAD));
    }
}

/// The golden's text through the whole program.
pub(super) struct WholeRun<'g> {
    golden: &'g Golden,
    pass: ForwardPass<'g>,
    /// Those of the golden's positions that have come by.
    rows: Vec<Option<RowMeasures>>,
    /// The logits of all positions, if they are to be kept.
    logits: Option<Vec<f32>>,
}

/// What the whole program gave in one way of calling.
pub(super) struct WholeGiven {
    pub(super) measures: LogitMeasures,
    /// If they were to be kept.
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
    type Given = WholeGiven;

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

    fn end(self, session: &TokenSession) -> Result<WholeGiven> {
        let rows: Vec<RowMeasures> = self.rows.into_iter().flatten().collect();
        let hidden = session.finish(self.pass)?.hidden;
        Ok(WholeGiven { measures: LogitMeasures::over(&rows), logits: self.logits, hidden })
    }
}

/// A part of the layers on hidden states of the golden.
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
    type Given = Vec<Vec<f32>>;

    fn done(&self) -> usize {
        self.0.done()
    }

    fn advance(&mut self, session: &mut TokenSession) -> Result<bool> {
        session.advance_forced(&mut self.0)
    }

    fn end(self, session: &TokenSession) -> Result<Self::Given> {
        session.finish_forced(self.0)
    }
}

//! Threads with stacks of a known size, for recursive work on input of strangers.

/// Runs work on a thread with a stack of `bytes`. A panic is an error with the text `panicked`.
pub(super) fn with_stack<T: Send>(bytes: usize, panicked: &str, work: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(bytes).spawn_scoped(scope, work);
        let thread = thread.map_err(|error| format!("there is no thread for it: {error}"))?;
        thread.join().map_err(|_| panicked.to_owned())
    })
}

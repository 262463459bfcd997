//! Common interface of all errors.
//!
//! Each crate has its own `thiserror` enum. The message says what is wrong and where (file, tensor, key; found,
//! expected). [`Diagnostic`] adds the exit code and a remedy.

use std::fmt::{Debug, Display};

use crate::listing::limited;

/// Cause of an error; the command line derives the exit code from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Invalid command, manifest or option: exit code 2.
    Usage,
    /// Unreadable, corrupt or unsupported source file or package: exit code 4.
    Source,
    /// Missing tool or platform, or a refusal by the system (disk full, no permission): exit code 5.
    Platform,
}

impl Fault {
    /// Process exit code for this fault.
    pub fn exit_code(self) -> u8 {
        match self {
            Fault::Usage => 2,
            Fault::Source => 4,
            Fault::Platform => 5,
        }
    }
}

/// Error with a fault and, where there is one, a remedy.
pub trait Diagnostic: std::error::Error + Send + Sync + 'static {
    /// Cause of the error.
    fn fault(&self) -> Fault;

    /// Remedy in one sentence; `None` if the message says it all.
    fn help(&self) -> Option<String> {
        None
    }
}

/// Any error of this crate, boxed for the user.
pub struct Error(Box<dyn Diagnostic>);

/// Result of an operation that reports to the user.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Cause of the error.
    pub fn fault(&self) -> Fault {
        self.0.fault()
    }

    /// Remedy, if there is one.
    pub fn help(&self) -> Option<String> {
        self.0.help()
    }

    /// Wrapped error.
    pub fn inner(&self) -> &dyn Diagnostic {
        &*self.0
    }

    /// The error as a concrete type, if it is of that type.
    pub fn downcast_ref<E: Diagnostic>(&self) -> Option<&E> {
        let error: &(dyn std::error::Error + 'static) = &*self.0;
        error.downcast_ref()
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl<E: Diagnostic> From<E> for Error {
    fn from(error: E) -> Self {
        Error(Box::new(error))
    }
}

impl Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Debug::fmt(&self.0, f)
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&limited(&self.0.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the disk is full")]
    struct Full(#[source] std::io::Error);

    impl Diagnostic for Full {
        fn fault(&self) -> Fault {
            Fault::Platform
        }
    }

    #[test]
    fn an_error_is_a_standard_error_with_its_source() {
        fn open() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            Err(Error::from(Full(std::io::ErrorKind::StorageFull.into())))?
        }
        let error = open().unwrap_err();
        assert_eq!(error.to_string(), "the disk is full");
        let inner = error.source().unwrap().downcast_ref::<std::io::Error>().unwrap();
        assert_eq!(inner.kind(), std::io::ErrorKind::StorageFull);
        assert!(error.downcast_ref::<Error>().unwrap().downcast_ref::<Full>().is_some());
    }
}

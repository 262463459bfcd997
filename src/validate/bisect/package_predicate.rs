//! Predicates on packages: Core ML's compiler, its placement, a user's command.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anec_base::{Diagnostic, Fault, FileError};

use tempfile::TempDir;

use super::{Failure, PREDICATES, Predicate};
use crate::residency::{UNITS, misplaced};
use anec_base::Result;
use anec_convert::ConvertError;
use anec_convert::compile::Compiler;
use anec_coreml::{CoreMlError, Engine};
use anec_manifest::nearest;
use anec_mil::verify::verify_function;
use anec_mil::{Function, Program};
use anec_package::WriteOptions;

/// Test of a package that contains one function.
pub trait ExternalPredicate {
    /// Returns the failures of a package.
    ///
    /// # Errors
    /// If the package can't be tested.
    fn ask(&mut self, function: &Function, package: &Path) -> Result<Vec<Failure>>;
}

/// Predicate that writes functions as packages and tests those.
pub struct PackagePredicate<A> {
    room: TempDir,
    /// Structural problems of the whole function; `None` before its first test.
    known: Option<BTreeSet<String>>,
    ask: A,
}

/// Fixed name of the packages, so that it can't influence the result.
const PACKAGE: &str = "piece.mlpackage";

impl<A: ExternalPredicate> PackagePredicate<A> {
    /// Creates a predicate that writes packages to a temporary folder.
    ///
    /// # Errors
    /// If there is no temporary folder.
    pub fn new(ask: A) -> Result<Self> {
        let room = tempfile::tempdir().map_err(FileError::of(std::env::temp_dir(), "create a folder in"))?;
        Ok(PackagePredicate { room, known: None, ask })
    }
}

/// Wraps a function as a program.
pub fn program(function: &Function) -> Program {
    Program::single(Function { name: "main".to_owned(), ..function.clone() })
}

impl<A: ExternalPredicate> Predicate for PackagePredicate<A> {
    fn failures(&mut self, function: &Function) -> Result<Vec<Failure>> {
        let findings: BTreeSet<String> = verify_function(function).iter().map(ToString::to_string).collect();
        let path = self.room.path().join(PACKAGE);
        let options = WriteOptions::default().replacing(true);
        let written = anec_package::write(&program(function), &path, &options);
        match &self.known {
            None => {
                self.known = Some(findings);
                written?;
            }
            // a piece that isn't a valid program or package would fail for that reason
            Some(known) if !findings.is_subset(known) || written.is_err() => return Ok(Vec::new()),
            Some(_) => {}
        }
        self.ask.ask(function, &path)
    }
}

/// Command of the user; `{}` stands for the package. A status other than 0 is a failure, except 125, which means "can't
/// tell" as for `git bisect`.
pub struct UserCommand {
    command: String,
}

/// Status of a command that can't tell.
const CANNOT_TELL: i32 = 125;

impl UserCommand {
    /// Creates a predicate from a shell command. Without `{}`, the package is the last argument.
    pub fn new(command: &str) -> Self {
        UserCommand { command: command.to_owned() }
    }

    /// Command line for the shell.
    fn line(&self, package: &str) -> String {
        match self.command.contains("{}") {
            true => with_path(&self.command, package),
            false => with_path(&format!("{} {{}}", self.command), package),
        }
    }
}

/// Replaces each `{}` of a command by a path. POSIX shells read it as part of one word, whatever characters the path
/// contains, whether or not `{}` is quoted.
fn with_path(command: &str, path: &str) -> String {
    if cfg!(windows) {
        return command.replace("{}", path);
    }
    let single = path.replace('\'', r"'\''");
    let (mut line, mut quote, mut rest) = (String::new(), None, command);
    while let Some(first) = rest.chars().next() {
        if let Some(after) = rest.strip_prefix("{}") {
            match quote {
                None => line.extend(["'", &single, "'"]),
                Some('\'') => line.push_str(&single),
                Some(_) => path.chars().for_each(|c| match c {
                    '$' | '`' | '"' | '\\' => line.extend(['\\', c]),
                    c => line.push(c),
                }),
            }
            rest = after;
            continue;
        }
        let escapes = first == '\\' && quote != Some('\'');
        match first {
            '\'' | '"' if quote.is_none() => quote = Some(first),
            c if quote == Some(c) => quote = None,
            _ => {}
        }
        // an escaped character neither begins nor ends a quote
        let taken: String = rest.chars().take(if escapes { 2 } else { 1 }).collect();
        line.push_str(&taken);
        rest = &rest[taken.len()..];
    }
    line
}

/// Command that the shell can't run.
#[derive(Debug, thiserror::Error)]
#[error("the predicate `{command}` can't be run: {said}")]
struct CommandNotRunnable {
    command: String,
    /// Message of the shell.
    said: String,
}

/// Statuses of a shell for a command that doesn't exist and one that isn't executable.
const NOT_RUNNABLE: [i32; 2] = [127, 126];

impl Diagnostic for CommandNotRunnable {
    fn fault(&self) -> Fault {
        Fault::Usage
    }

    fn help(&self) -> Option<String> {
        Some(match nearest(&self.command, PREDICATES) {
            Some(name) => format!("did you mean `{name}`?"),
            None => format!("give {}, or a command that the shell can run", PREDICATES.join(", ")),
        })
    }
}

impl ExternalPredicate for UserCommand {
    fn ask(&mut self, _: &Function, package: &Path) -> Result<Vec<Failure>> {
        let [shell, flag] = if cfg!(windows) { ["cmd", "/C"] } else { ["/bin/sh", "-c"] };
        let run = Command::new(shell).args([flag, &self.line(&package.display().to_string())]).output();
        let output = run.map_err(FileError::of(PathBuf::from(shell), "run"))?;
        let status = output.status;
        if status.success() || status.code() == Some(CANNOT_TELL) {
            return Ok(Vec::new());
        }
        let said = [output.stderr, output.stdout].map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
        let last = said.iter().find_map(|text| text.lines().next_back()).unwrap_or("it says nothing");
        if status.code().is_some_and(|code| NOT_RUNNABLE.contains(&code)) {
            return Err(CommandNotRunnable { command: self.command.clone(), said: last.to_owned() }.into());
        }
        Ok(vec![Failure { kind: "the command fails".into(), detail: format!("{status}: {last}") }])
    }
}

/// Core ML's compiler.
pub struct Compile(pub Arc<Compiler>);

impl ExternalPredicate for Compile {
    fn ask(&mut self, _: &Function, package: &Path) -> Result<Vec<Failure>> {
        let folder = package.parent().unwrap_or(Path::new("."));
        match self.0.compile(folder, PACKAGE) {
            Ok(_) => Ok(Vec::new()),
            Err(error @ ConvertError::Compiler { .. }) => {
                Ok(vec![Failure { kind: "it doesn't compile".into(), detail: error.to_string() }])
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Core ML's placement: fails for ops that don't prefer the Neural Engine. Small pieces may legitimately prefer the
/// CPU, so the result shows where the problem is visible, without proving it.
pub struct Residency<E>(pub Arc<E>);

impl<E: Engine> ExternalPredicate for Residency<E> {
    fn ask(&mut self, function: &Function, package: &Path) -> Result<Vec<Failure>> {
        let compiled = package.with_extension("mlmodelc");
        let planned = self.0.compile(package, &compiled).and_then(|()| self.0.plan(&compiled, UNITS));
        if compiled.exists() {
            std::fs::remove_dir_all(&compiled).map_err(FileError::of(&compiled, "remove"))?;
        }
        match planned {
            Ok(operations) => {
                let failure = |op: crate::verdict::MisplacedOp| {
                    let device = op.device.map_or_else(|| "no device".to_owned(), |device| device.to_string());
                    let kind = format!("{} on {device}", op.operator);
                    Failure { detail: format!("`{}` ({}) prefers {device}", op.output, op.operator), kind }
                };
                Ok(misplaced(function, &operations).into_iter().map(failure).collect())
            }
            Err(error @ CoreMlError::Refused { .. }) => {
                Ok(vec![Failure { kind: "Core ML refuses it".into(), detail: error.to_string() }])
            }
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bisect::bisect;
    use anec_coreml::plan::Device;
    use anec_testing::fake::{DoubleEngine, convert_demo};

    /// Shard of the demo model.
    fn shard(room: &Path) -> Function {
        convert_demo(room, &["lengths={fixed: [2]}"]);
        anec_package::open(&room.join("layers_3_6.mlpackage")).unwrap().program.functions.remove(0)
    }

    #[test]
    fn an_op_that_prefers_the_cpu_is_found() {
        let room = tempfile::tempdir().unwrap();
        let function = shard(room.path());
        let mut engine = DoubleEngine::new();
        engine.elsewhere.insert("softmax", Device::Cpu);
        let mut predicate = PackagePredicate::new(Residency(Arc::new(engine))).unwrap();
        let found = bisect(&function, &mut predicate).unwrap().unwrap();
        assert_eq!(found.ops.len(), 1, "{found:#?}");
        // the first of many
        assert_eq!((found.ops[0].operator.as_str(), found.ops[0].layer), ("softmax", Some(3)));
        assert!(found.findings[0].ends_with("prefers CPU"), "{:?}", found.findings);
        // nothing fails on the Neural Engine
        let mut predicate = PackagePredicate::new(Residency(Arc::new(DoubleEngine::new()))).unwrap();
        assert!(bisect(&function, &mut predicate).unwrap().is_none());
    }

    #[cfg(unix)]
    #[test]
    fn a_program_says_which_pieces_fail() {
        let room = tempfile::tempdir().unwrap();
        let function = shard(room.path());
        let of =
            |command: &str| bisect(&function, &mut PackagePredicate::new(UserCommand::new(command)).unwrap()).unwrap();
        let model = "{}/Data/com.apple.CoreML/model.mlmodel";
        let found = of(&format!("! grep -q layers_4_mlp_silu {model}")).unwrap();
        let names: Vec<&str> = found.ops.iter().map(|op| op.name.as_str()).collect();
        // ops that read the value contain its name, too: one op suffices
        assert_eq!(names.len(), 1, "{names:?}");
        assert!(names[0].starts_with("layers_4_mlp"), "{names:?}");
        assert!(found.findings[0].starts_with("exit status: 1"), "{:?}", found.findings);
        // status 125 isn't a failure
        assert!(of("exit 125").is_none() && of("test -d").is_none());
    }

    #[cfg(unix)]
    #[test]
    fn a_path_stays_one_word_wherever_a_command_has_it() {
        let path = "/some where/it's $HOME `id` \"here\\/piece.mlpackage";
        let said = |command: &str| {
            let line = UserCommand::new(command).line(path);
            String::from_utf8(Command::new("/bin/sh").args(["-c", &line]).output().unwrap().stdout).unwrap()
        };
        for command in ["printf '[%s]'", "printf '[%s]' {}", "printf '[%s]' \"{}\"", "printf '[%s]' '{}'"] {
            assert_eq!(said(command), format!("[{path}]"), "{command}");
        }
        assert_eq!(said(r#"printf '[%s]' it\'s {}/Data "a\"b" {}"#), format!("[it's][{path}/Data][a\"b][{path}]"));
    }

    #[cfg(unix)]
    #[test]
    fn a_command_that_the_shell_cannot_run_is_no_failure_of_the_package() {
        let room = tempfile::tempdir().unwrap();
        let function = shard(room.path());
        let error = |command: &str| {
            let found = bisect(&function, &mut PackagePredicate::new(UserCommand::new(command)).unwrap());
            let error = found.unwrap_err();
            assert_eq!(error.fault(), Fault::Usage, "{error}");
            (error.to_string(), error.help().unwrap())
        };
        let (said, help) = error("structur");
        assert!(said.starts_with("the predicate `structur` can't be run: "), "{said}");
        assert_eq!(help, "did you mean `structure`?");
        let script = room.path().join("script");
        std::fs::write(&script, "exit 0").unwrap();
        // exists, but isn't executable
        assert!(error(script.to_str().unwrap()).1.ends_with("or a command that the shell can run"));
    }
}

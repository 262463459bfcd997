//! Parses every command on the pages: many can't run in tests for want of a model or a Mac.

use std::path::{Path, PathBuf};

use clap::CommandFactory;

use super::Cli;

/// README, CONTRIBUTING and the book's pages.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let book = std::fs::read_dir(root.join("book/src")).unwrap().map(|entry| entry.unwrap().path());
    let pages = book.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.chain(["README.md", "CONTRIBUTING.md"].map(|name| root.join(name))).collect()
}

/// Lines of the shell blocks of a page with their numbers. Continued lines are joined.
fn commands(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut block, mut open): (Vec<(usize, String)>, Option<&str>, Option<String>) = Default::default();
    for (index, line) in text.lines().enumerate() {
        match (block, line.trim_start().strip_prefix("```")) {
            (None, Some(language)) => block = Some(language),
            (Some(_), Some(_)) => block = None,
            (Some("sh"), None) => match line.strip_suffix('\\') {
                Some(part) => *open.get_or_insert_default() += part,
                None => found.push((index + 1, open.take().unwrap_or_default() + line)),
            },
            (Some("console"), None) => found.extend(line.strip_prefix("$ ").map(|line| (index + 1, line.to_owned()))),
            _ => {}
        }
    }
    found
}

/// Splits a line into commands and words, as a shell does for quotes, comments and separators. Redirection targets
/// aren't words.
fn words(line: &str) -> Vec<Vec<String>> {
    let (mut commands, mut word, mut quote, mut redirects) = (vec![Vec::new()], None::<String>, None::<char>, false);
    let end = |word: &mut Option<String>, redirects: &mut bool, commands: &mut Vec<Vec<String>>| {
        if let Some(word) = word.take().filter(|_| !std::mem::take(redirects)) {
            commands.last_mut().unwrap().push(word);
        }
    };
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, ' ') => end(&mut word, &mut redirects, &mut commands),
            (None, '|' | ';' | '&') => {
                end(&mut word, &mut redirects, &mut commands);
                commands.push(Vec::new());
            }
            (None, '<' | '>') => {
                // `2>` is a stream, not a word
                word = word.filter(|word| word.parse::<u8>().is_err());
                end(&mut word, &mut redirects, &mut commands);
                redirects = true;
            }
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    end(&mut word, &mut redirects, &mut commands);
    commands
}

/// Arguments of a command that runs `anec`.
fn arguments(command: Vec<String>) -> Option<Vec<String>> {
    let own = |word: &String| word == "anec";
    let before = |word: &String| word == "sudo" || word == "uvx" || word.contains('=');
    let start = command.iter().position(|word| !before(word))?;
    command.get(start).filter(|word| own(word))?;
    Some(command[start..].to_vec())
}

#[test]
fn commands_on_pages_parse() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for (line, command) in commands(&text) {
            for arguments in words(&command).into_iter().filter_map(arguments) {
                count += 1;
                if let Err(error) = Cli::command().try_get_matches_from(&arguments)
                    && error.use_stderr()
                {
                    let page = page.file_name().unwrap().display();
                    wrong.push(format!("{page}:{line}: {}\n{error}", arguments.join(" ")));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 100, "only {count} commands were found");
}

#[test]
fn lines_are_split_as_a_shell_splits_them() {
    let line =
        "sudo anec run b --prompt \"a # b\" --chat > out.txt 2> /dev/null && anec ls | head -3   # anec --nothing";
    let found: Vec<_> = words(line).into_iter().filter_map(arguments).collect();
    assert_eq!(found, [vec!["anec", "run", "b", "--prompt", "a # b", "--chat"], vec!["anec", "ls"]]);
    let page =
        "```sh\nanec ls \\\n  --json\n```\n\n```text\nanec no\n```\n```console\n$ anec rm x\nanec printed\n```\n";
    assert_eq!(commands(page), [(3, "anec ls   --json".into()), (10, "anec rm x".into())]);
}

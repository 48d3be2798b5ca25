//! Which programs of a run are left when the first one has ended.
//!
//! A program that has asked the agent something is known by its connection. One that has not asked yet, such as a background child
//! of a shell, is known by what the kernel tells of it: it is in the session of the run, and has the run's token in its environment.
//! Programs in a session of their own, as daemons are, count only while they use the cluster: they may live for ever. So do those
//! whose environment cannot be read or is gone: of another user, or overwritten by the program.

use std::time::Duration;
use std::{fs, thread};

use impresario_interpose::served::protocol::TOKEN_VARIABLE;

/// How often is looked again for a program that is just becoming another one, whose environment is empty meanwhile, and how long after.
const LOOKS: u32 = 5;
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// A program of the run.
    Program,
    /// A process of the session without an environment.
    Nameless,
    Nothing,
}

/// Whether there is a program that belongs to the run with this token.
pub(crate) fn is_any_left(token: &str) -> bool {
    let variable = format!("{TOKEN_VARIABLE}={token}");
    let mut nothing = 0;
    for _ in 0..LOOKS {
        match look(variable.as_bytes()) {
            Found::Program => return true,
            // Processes are listed by their numbers, and one that begins meanwhile may have a number that was passed already.
            Found::Nothing if nothing > 0 => return false,
            Found::Nothing => nothing += 1,
            Found::Nameless => thread::sleep(LOOK_AGAIN_AFTER),
        }
    }
    false
}

/// Looks at all processes of the machine.
fn look(variable: &[u8]) -> Found {
    let (Some((_, session)), Ok(processes)) = (state_of("self"), fs::read_dir("/proc")) else { return Found::Nothing };
    let names = processes.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut found = Found::Nothing;
    for name in names.filter(|name| name.parse::<u32>().is_ok()) {
        // One that has ended and was not waited for asks nothing any more.
        if !state_of(&name).is_some_and(|(state, of)| of == session && !matches!(state, 'Z' | 'X')) {
            continue;
        }
        let Ok(environment) = fs::read(format!("/proc/{name}/environ")) else { continue };
        if environment.split(|byte| *byte == 0).any(|word| word == variable) {
            return Found::Program;
        }
        if environment.is_empty() {
            found = Found::Nameless;
        }
    }
    found
}

/// The state and the session of a process; the session is 0 where its leader is in another name space of processes.
fn state_of(process: &str) -> Option<(char, u32)> {
    let stat = fs::read(format!("/proc/{process}/stat")).ok()?;
    // State, parent, group and session come behind the name, which may contain anything.
    let stat = String::from_utf8_lossy(&stat);
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.nth(2)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn start(program: &[&str], token: &str) -> Child {
        Command::new(program[0]).args(&program[1..]).env(TOKEN_VARIABLE, token).spawn().unwrap()
    }

    #[test]
    fn programs_of_the_run_are_left_until_they_have_ended() {
        assert!(!is_any_left("left-1"));
        let mut child = start(&["sleep", "100"], "left-1");
        assert!(is_any_left("left-1"));
        assert!(!is_any_left("left"), "of another run");
        child.kill().unwrap();
        // It has ended, and nobody has waited for it.
        impresario_testing::until("its end", || {
            state_of(&child.id().to_string()).is_some_and(|(state, _)| state == 'Z')
        });
        assert!(!is_any_left("left-1"));
        child.wait().unwrap();
    }

    #[test]
    fn a_program_without_the_token_or_in_a_session_of_its_own_is_none() {
        let mut bare = Command::new("sleep").arg("100").env_clear().spawn().unwrap();
        let mut daemon = start(&["setsid", "sleep", "100"], "left-2");
        let own = daemon.id().to_string();
        impresario_testing::until("its own session", || {
            state_of(&own).is_some_and(|(_, session)| session.to_string() == own)
        });
        assert!(!is_any_left("left-2"));
        for child in [&mut bare, &mut daemon] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// One program becomes the next without an end: there is always one.
    #[test]
    fn a_program_that_becomes_another_one_is_left_all_the_time() {
        let script = "if [ \"$1\" = 0 ]; then exec sleep 100; else exec sh \"$0\" $(($1 - 1)); fi";
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("again.sh");
        fs::write(&file, script).unwrap();
        let mut child = start(&["sh", file.to_str().unwrap(), "300"], "left-3");
        let comm = format!("/proc/{}/comm", child.id());
        while fs::read_to_string(&comm).unwrap().trim() != "sleep" {
            assert!(is_any_left("left-3"));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

//! The rooms of the house as doc/ARCHITECTURE.md has them: each package has a row, knows only rooms on lower floors, and
//! leaves to others what its row says that it does not know.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A row of the table of rooms.
struct Row {
    /// None for what only tests use, and for the laboratory.
    floor: Option<u32>,
    ignores: String,
}

/// A package of the workspace.
struct Package {
    folder: PathBuf,
    /// Index of its row.
    row: usize,
    dependencies: Vec<String>,
    for_tests: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The rows of the table, and the row of each folder.
fn rows() -> (Vec<Row>, BTreeMap<PathBuf, usize>) {
    let text = read(&root().join("doc/ARCHITECTURE.md"));
    let table = text.split_once("| floor | room |").expect("the table of rooms").1;
    let (mut rows, mut of) = (Vec::new(), BTreeMap::new());
    for line in table.lines().skip(2).take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [floor, names, _, ignores] = cells[..] else { panic!("not four cells: {line}") };
        for name in names.split('`').skip(1).step_by(2) {
            let name = name.trim_end_matches('/');
            let outside = name == "lab" || name.starts_with("integrations");
            of.insert(if outside { name.into() } else { Path::new("crates").join(name) }, rows.len());
        }
        rows.push(Row { floor: floor.parse().ok(), ignores: ignores.into() });
    }
    (rows, of)
}

fn manifests(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            manifests(&path, found);
        } else if path.ends_with("Cargo.toml") {
            found.push(path);
        }
    }
}

/// All packages of the workspace, by name without "impresario-".
fn packages(of: &BTreeMap<PathBuf, usize>) -> BTreeMap<String, Package> {
    let mut found = Vec::new();
    for top in ["crates", "lab", "integrations"] {
        manifests(&root().join(top), &mut found);
    }
    let package = |path: PathBuf| {
        let folder = path.parent().unwrap().strip_prefix(root()).unwrap().to_path_buf();
        let row = folder.ancestors().find_map(|folder| of.get(folder));
        let row = *row.unwrap_or_else(|| panic!("doc/ARCHITECTURE.md has no row for {}", folder.display()));
        let (mut section, mut name) = ("", None);
        let (mut dependencies, mut for_tests) = (Vec::new(), Vec::new());
        let text = read(&path);
        for line in text.lines() {
            if line.starts_with('[') {
                section = line.trim_matches(['[', ']']);
            } else if let Some(known) = line.strip_prefix("impresario-") {
                let known = known.split(['.', ' ', '=']).next().unwrap().to_string();
                match section {
                    "dependencies" | "build-dependencies" => dependencies.push(known),
                    "dev-dependencies" => for_tests.push(known),
                    _ => {}
                }
            } else if let (Some(value), "package") = (line.strip_prefix("name = \"impresario-"), section) {
                name = Some(value.trim_end_matches('"').to_string());
            }
        }
        (name.expect("a package's name"), Package { folder, row, dependencies, for_tests })
    };
    found.into_iter().map(package).collect()
}

#[test]
fn every_package_knows_only_rooms_on_lower_floors() {
    let (rows, of) = rows();
    let packages = packages(&of);
    let mut known = 0;
    for (name, package) in &packages {
        for other in &package.dependencies {
            let below = &packages[other];
            let (floor, below_floor) = (rows[package.row].floor, rows[below.row].floor);
            // The laboratory is above everything.
            let is_lower = below_floor.is_some_and(|below| floor.is_none_or(|floor| below < floor));
            assert!(
                is_lower || package.row == below.row,
                "{name} on floor {floor:?} depends on {other} on floor {below_floor:?}"
            );
            known += 1;
        }
        // Tests may use what is above, but not the laboratory.
        assert!(!package.for_tests.contains(&"lab".to_string()), "{name}");
    }
    assert!(packages.len() > 30 && known > 100, "{} packages, {known} dependencies", packages.len());
    for (folder, row) in &of {
        let is_there = packages.values().any(|package| package.row == *row && package.folder.starts_with(folder));
        assert!(is_there, "doc/ARCHITECTURE.md has a row for {}, where no package is", folder.display());
    }
}

/// The integration tests of a crate are one program, which has to name each of their files.
#[test]
fn every_file_of_tests_belongs_to_a_program() {
    let mut found = Vec::new();
    for top in ["crates", "lab", "integrations"] {
        manifests(&root().join(top), &mut found);
    }
    let mut named = 0;
    for manifest in found {
        let (tests, text) = (manifest.parent().unwrap().join("tests"), read(&manifest));
        if !text.contains("autotests = false") {
            let several = std::fs::read_dir(&tests).into_iter().flatten().flatten();
            let several = several.filter(|entry| entry.path().extension().is_some_and(|kind| kind == "rs"));
            assert!(several.count() <= 1, "{}: one program of tests, with `autotests = false`", manifest.display());
            continue;
        }
        let modules = read(&tests.join("main.rs"));
        for file in std::fs::read_dir(&tests).unwrap().map(|entry| entry.unwrap().path()) {
            let Some(stem) = file.file_stem().and_then(|stem| stem.to_str()).filter(|_| file.is_file()) else {
                continue;
            };
            let is_named =
                modules.contains(&format!("mod {stem};\n")) || text.contains(&format!("\"tests/{stem}.rs\""));
            assert!(is_named || !file.to_string_lossy().ends_with(".rs"), "no program has {}", file.display());
            named += usize::from(is_named);
        }
    }
    assert!(named > 80, "{named}");
}

/// A library or command that is built without a program of unit tests has none.
#[test]
fn no_test_is_where_none_is_run() {
    let mut found = Vec::new();
    for top in ["crates", "lab", "integrations"] {
        manifests(&root().join(top), &mut found);
    }
    let mut untested = 0;
    for manifest in found {
        let (folder, text) = (manifest.parent().unwrap(), read(&manifest));
        for section in text.split("\n[").filter(|section| section.lines().any(|line| line == "test = false")) {
            let path = section.lines().find_map(|line| line.strip_prefix("path = \"")?.strip_suffix('"'));
            let mut files = Vec::new();
            match path {
                Some(path) => files.push((folder.join(path), String::new())),
                None => sources(&folder.join("src"), &[], &mut files),
            }
            for (path, _) in files {
                let has_tests = ["#[test]", "#[cfg(test)]"].iter().any(|sign| read(&path).contains(sign));
                assert!(!has_tests, "no program runs the tests of {}", path.display());
                untested += 1;
            }
        }
    }
    assert!(untested >= 5, "{untested}");
}

/// The hops of the paths in doc/ARCHITECTURE.md are files or folders of rooms.
#[test]
fn the_paths_of_a_request_are_there() {
    let text = read(&root().join("doc/ARCHITECTURE.md"));
    let paths = text.split_once("### Five paths").expect("the paths").1.split("\n## ").next().unwrap();
    let rooms: Vec<PathBuf> = rows().1.into_keys().collect();
    let mut hops = 0;
    for piece in paths.split("\n- ").skip(1).flat_map(|path| path.split(['→', '‖'])) {
        // The other names are those of types, and of several files.
        let is_hop = |name: &&str| name.chars().all(|c| c.is_ascii_lowercase() || "/_*".contains(c));
        let Some(name) = piece.split('`').nth(1).filter(is_hop) else { continue };
        let name = name.trim_end_matches("/*");
        let is_there = rooms.iter().any(|room| {
            let below = room.strip_prefix("crates").unwrap_or(room);
            let Ok(rest) = Path::new(name).strip_prefix(below) else { return false };
            let source = root().join(room).join("src").join(rest);
            source.is_dir() || source.with_extension("rs").is_file()
        });
        assert!(is_there, "doc/ARCHITECTURE.md: there is no {name}");
        hops += 1;
    }
    assert!(hops > 30, "{hops} hops");
}

/// Words of a row's last column, and what only code that knows these things contains.
const SIGNS: [(&str, &[&str]); 4] = [
    ("threads", &["std::thread", "thread::spawn"]),
    ("clocks", &["Instant::now", "SystemTime::now"]),
    ("sockets", &["TcpStream", "TcpListener", "UnixStream", "UnixListener", "UdpSocket", "rustix::net"]),
    ("files", &["std::fs", "fs::File"]),
];

/// The sources below a folder but tests and other packages, each up to its unit tests.
fn sources(folder: &Path, packages: &[PathBuf], found: &mut Vec<(PathBuf, String)>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        if stem.ends_with("tests") || stem == "testing" || packages.contains(&path) {
            continue;
        }
        if path.is_dir() {
            sources(&path, packages, found);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            let code = read(&path).split("#[cfg(test)]\nmod tests {").next().unwrap().to_string();
            found.push((path, code));
        }
    }
}

#[test]
fn rooms_leave_to_others_what_they_do_not_know() {
    let (rows, of) = rows();
    let folders: Vec<PathBuf> = of.keys().map(|folder| root().join(folder)).collect();
    let mut checked = 0;
    for (folder, row) in &of {
        let ignores = &rows[*row].ignores;
        let ignored: Vec<_> = SIGNS.iter().filter(|(word, _)| ignores.split([',', ' ']).any(|w| w == *word)).collect();
        let mut found = Vec::new();
        if !ignored.is_empty() {
            sources(&root().join(folder).join("src"), &folders, &mut found);
        }
        for (path, code) in found {
            for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
                for (word, signs) in &ignored {
                    let sign = signs.iter().find(|sign| line.contains(**sign));
                    assert!(sign.is_none(), "{} does not know {word}: {line}", path.display());
                }
                checked += 1;
            }
        }
    }
    assert!(checked > 10_000, "{checked} lines were checked");
}

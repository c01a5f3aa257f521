//! Imports between files of a crate, found in their text: `mod`, `use`, and paths that begin with `crate`, `super` or a
//! child.
//!
//! Test code is left out. A name that a file re-exports counts as an import of the file that defines it, so a module's
//! root may list its parts, and the list hides no import.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A module's path from the crate's root; the root's is empty.
type Module = Vec<String>;

/// The files of a crate.
pub(crate) struct Crate(BTreeMap<Module, File>);

struct File {
    /// The text without `use`.
    code: String,
    /// Path of each name that `use` brings into scope. `None` for another crate's.
    names: BTreeMap<String, Option<Vec<String>>>,
    /// Paths of imports: of private `use`, of re-exports that the file itself uses, and of the code.
    paths: Vec<Vec<String>>,
}

impl Crate {
    /// Reads the crate whose root is `lib`.
    pub(crate) fn read(lib: &Path) -> Self {
        let mut files = BTreeMap::new();
        let folder = lib.parent().unwrap();
        read(lib, folder, Vec::new(), &mut files);
        let mut all = Self(files);
        let modules: BTreeSet<_> = all.0.keys().cloned().collect();
        for (module, file) in &mut all.0 {
            file.find_paths(module, &modules);
        }
        all
    }

    /// The files by module, and the modules that each imports.
    pub(crate) fn imports(&self) -> BTreeMap<String, BTreeSet<String>> {
        let name = |module: &Module| if module.is_empty() { "lib".into() } else { module.join("::") };
        let imports = |module: &Module, file: &File| {
            let targets = file.paths.iter().filter_map(|path| self.definition(path.clone(), 0));
            targets.filter(|target| target != module).map(|target| name(&target)).collect()
        };
        self.0.iter().map(|(module, file)| (name(module), imports(module, file))).collect()
    }

    /// The module that defines the item at `path`; `None` for another crate's.
    fn definition(&self, path: Vec<String>, depth: usize) -> Option<Module> {
        let len = (0..=path.len()).rev().find(|len| self.0.contains_key(&path[..*len]))?;
        let (module, rest) = path.split_at(len);
        let passed_on = rest.first().and_then(|name| self.0[module].names.get(name));
        match passed_on {
            Some(None) => None,
            Some(Some(target)) if depth < 8 => {
                let target = target.iter().chain(&rest[1..]).cloned().collect();
                self.definition(target, depth + 1)
            }
            _ => Some(module.to_vec()),
        }
    }
}

/// Reads a file and those of its child modules.
fn read(path: &Path, folder: &Path, module: Module, files: &mut BTreeMap<Module, File>) {
    let text = without_tests(&fs::read_to_string(path).unwrap());
    let (mut code, mut uses) = (String::new(), Vec::new());
    let mut rest = text.as_str();
    // `use` begins a line, after its visibility.
    while let Some(start) = find_use(rest) {
        let end = start + rest[start..].find(';').unwrap();
        let (visibility, tree) = rest[start..end].split_once("use ").unwrap();
        uses.push((visibility.trim().starts_with("pub"), tree.to_string()));
        code.push_str(&rest[..start]);
        rest = &rest[end + 1..];
    }
    code.push_str(rest);
    let mut given = None;
    for line in code.lines() {
        if let Some(path) = line.strip_prefix("#[path = \"") {
            given = path.split('"').next();
            continue;
        }
        let Some((_, child)) =
            line.split_once("mod ").filter(|(before, _)| before.is_empty() || before.starts_with("pub"))
        else {
            continue;
        };
        let Some(child) = child.strip_suffix(';') else { continue };
        let here = path.parent().unwrap();
        let (beside, inside) = match given.take() {
            Some(given) => (vec![here.join(given)], here.to_path_buf()),
            None => {
                let inside = folder.join(child);
                (vec![folder.join(format!("{child}.rs")), inside.join("mod.rs")], inside)
            }
        };
        let file = beside.iter().find(|file| file.exists()).unwrap();
        read(file, &inside, [&module[..], &[child.to_string()]].concat(), files);
    }
    let mut file = File { code, names: BTreeMap::new(), paths: Vec::new() };
    for (public, tree) in uses {
        for (name, path) in expand(&tree) {
            // Private ones count as imports even if unused, which the compiler would report.
            if !public {
                file.paths.push(path.clone());
            }
            file.names.insert(name, Some(path));
        }
    }
    files.insert(module, file);
}

fn find_use(text: &str) -> Option<usize> {
    let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1));
    starts.into_iter().find(|start| {
        let line = text[*start..].trim_start();
        let after = match line.strip_prefix("pub") {
            Some(rest) if rest.starts_with('(') => rest.split_once(") ").map_or("", |(_, rest)| rest),
            Some(rest) => rest.trim_start(),
            None => line,
        };
        after.starts_with("use ")
    })
}

/// The text without comments and without items marked `#[cfg(test)]` or similar.
fn without_tests(text: &str) -> String {
    let mut kept = String::new();
    let mut lines = text.lines().map(|line| line.split("//").next().unwrap_or(""));
    while let Some(line) = lines.next() {
        let marked = line.trim_start();
        if !(marked.starts_with("#[cfg(test)]") || marked.starts_with("#[cfg(any(test")) {
            kept.push_str(line);
            kept.push('\n');
            continue;
        }
        let end = format!("{}}}", &line[..line.len() - marked.len()]);
        let item = lines.by_ref().find(|line| !line.trim_start().starts_with("#[")).unwrap_or("");
        if !item.trim_end().ends_with([';', ',']) {
            lines.by_ref().find(|line| line.starts_with(&end));
        }
    }
    kept
}

/// The names that a `use` brings into scope, and their paths.
fn expand(tree: &str) -> Vec<(String, Vec<String>)> {
    let tree = tree.trim();
    let Some((prefix, list)) = tree.split_once('{') else {
        let (path, alias) = tree.split_once(" as ").unwrap_or((tree, ""));
        let mut path: Vec<_> = path.split("::").map(str::to_string).collect();
        if path.last().is_some_and(|last| last == "self" || last == "*") && path.len() > 1 {
            path.pop();
        }
        let name = if alias.is_empty() { path.last().unwrap().clone() } else { alias.to_string() };
        return vec![(name, path)];
    };
    let list = list.strip_suffix('}').unwrap();
    let (mut depth, mut items) = (0, vec![String::new()]);
    for letter in list.chars() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => items.push(String::new()),
            _ => {}
        }
        if letter != ',' || depth > 0 {
            items.last_mut().unwrap().push(letter);
        }
    }
    let items = items.iter().map(|item| item.trim()).filter(|item| !item.is_empty());
    items.flat_map(|item| expand(&format!("{prefix}{item}"))).collect()
}

impl File {
    /// Makes all paths begin at the crate's root, removes those of other crates, and adds those in the code.
    fn find_paths(&mut self, module: &Module, modules: &BTreeSet<Module>) {
        let absolute = |path: &[String]| -> Option<Vec<String>> {
            let mut base = match path.first()?.as_str() {
                "crate" => Vec::new(),
                "super" | "self" => module.clone(),
                child => {
                    let child = [&module[..], &[child.to_string()]].concat();
                    return modules.contains(&child).then(|| [&module[..], path].concat());
                }
            };
            let supers = path.iter().filter(|part| *part == "super").count();
            base.truncate(base.len().checked_sub(supers)?);
            let rest = path.iter().skip_while(|part| ["crate", "super", "self"].contains(&part.as_str()));
            Some(base.into_iter().chain(rest.cloned()).collect())
        };
        for path in paths(&self.code) {
            self.paths.push(path);
        }
        // A re-export that the file itself uses is an import, too.
        let words: BTreeSet<_> = self.code.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
        let needed = self.names.iter().filter(|(name, _)| words.contains(name.as_str()));
        self.paths.extend(needed.filter_map(|(_, path)| path.clone()));
        self.paths = self.paths.iter().filter_map(|path| absolute(path)).collect();
        let names = self.names.iter().map(|(name, path)| (name.clone(), path.as_deref().and_then(absolute)));
        self.names = names.collect();
    }
}

/// The paths of more than one part in `code`.
fn paths(code: &str) -> Vec<Vec<String>> {
    let words = code.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
    let paths = words.map(|word| word.trim_matches(':')).filter(|word| word.contains("::"));
    paths.map(|path| path.split("::").map(str::to_string).collect()).collect()
}

/// A cycle among `imports`, if there is one: modules each of which imports the next, and the last the first.
pub(crate) fn circle(imports: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    fn visit(
        module: &str,
        imports: &BTreeMap<String, BTreeSet<String>>,
        path: &mut Vec<String>,
        done: &mut BTreeSet<String>,
    ) -> Option<Vec<String>> {
        if let Some(start) = path.iter().position(|visited| visited == module) {
            return Some(path[start..].to_vec());
        }
        if done.contains(module) {
            return None;
        }
        path.push(module.to_string());
        let found = imports.get(module).into_iter().flatten().find_map(|next| visit(next, imports, path, done));
        path.pop();
        done.insert(module.to_string());
        found
    }
    let mut done = BTreeSet::new();
    imports.keys().find_map(|module| visit(module, imports, &mut Vec::new(), &mut done))
}

/// The imports between the top-level modules of a crate.
pub(crate) fn rooms(imports: &BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    let room = |module: &str| module.split("::").next().unwrap_or_default().to_string();
    let mut rooms: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (module, targets) in imports {
        let others = targets.iter().map(|target| room(target)).filter(|other| *other != room(module));
        rooms.entry(room(module)).or_default().extend(others);
    }
    rooms
}

/// The imports between the parts of the module `parent`: its own file, `self`, and its child modules, each with its
/// descendants.
pub(crate) fn parts(imports: &BTreeMap<String, BTreeSet<String>>, parent: &str) -> BTreeMap<String, BTreeSet<String>> {
    let below = format!("{parent}::");
    let name = |module: &str| match module == parent {
        true => Some("self".to_string()),
        false => module.strip_prefix(&below).map(str::to_string),
    };
    let within = imports.iter().filter_map(|(module, targets)| {
        Some((name(module)?, targets.iter().filter_map(|target| name(target)).collect()))
    });
    rooms(&within.collect())
}

//! A shared library without anything, for programs of 32 bits: their loader complains on standard error about a library
//! that is not there or of another kind, and loads this one without a word.

/// ELF's numbers of the machines whose 64-bit systems run programs of 32 bits.
#[derive(Clone, Copy, Debug)]
pub enum Machine {
    /// x86 (`EM_386`).
    I386 = 3,
    /// ARM (`EM_ARM`).
    Arm = 40,
}

/// ELF headers of 32 bits, bytes.
const HEADER: u32 = 52;
const SEGMENT: u32 = 32;
/// One empty symbol, a hash table that leads to nothing, an empty name.
const SYMBOLS: u32 = 16;
const HASH: u32 = 16;
const NAMES: u32 = 4;
/// Type and value of each entry.
const DYNAMIC: u32 = 6 * 8;

const PAGE: u32 = 0x1000;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
/// Its flags, without execution, are those of the stack; where it is missing, the stack becomes executable.
const PT_GNU_STACK: u32 = 0x6474_e551;
/// The loader writes addresses into the dynamic section, so that it must be writable.
const READ_WRITE: u32 = 6;

/// The file of a shared library for `machine`, 32 bits, little-endian, that needs and defines nothing.
pub fn empty_library(machine: Machine) -> Vec<u8> {
    let symbols = HEADER + 3 * SEGMENT;
    let (hash, names, dynamic) = (symbols + SYMBOLS, symbols + SYMBOLS + HASH, symbols + SYMBOLS + HASH + NAMES);
    let len = dynamic + DYNAMIC;
    // Class 32 bits, little-endian, version 1; a shared library (3) for the machine.
    let mut file = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let mut words = |words: &[u32]| words.iter().for_each(|word| file.extend(word.to_le_bytes()));
    // Version, no start, the segments, no sections, flags (of ARM: EABI 5); then sizes and numbers, two in each word.
    let flags = if matches!(machine, Machine::Arm) { 0x0500_0000 } else { 0 };
    words(&[3 | (machine as u32) << 16, 1, 0, HEADER, 0, flags, HEADER | SEGMENT << 16, 3, 0]);
    words(&[PT_LOAD, 0, 0, 0, len, len, READ_WRITE, PAGE]);
    words(&[PT_DYNAMIC, dynamic, dynamic, dynamic, DYNAMIC, DYNAMIC, READ_WRITE, 4]);
    words(&[PT_GNU_STACK, 0, 0, 0, 0, 0, READ_WRITE, 16]);
    words(&[0; SYMBOLS as usize / 4]);
    // One bucket, one chain, both empty.
    words(&[1, 1, 0, 0]);
    words(&[0]);
    // DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_NULL.
    words(&[4, hash, 5, names, 6, symbols, 10, 1, 11, SYMBOLS, 0, 0]);
    debug_assert_eq!(file.len(), len as usize);
    file
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn readers_of_elf_find_no_fault() {
        if !impresario_testing::require("readelf") {
            return;
        }
        for (machine, name) in [(Machine::I386, "Intel 80386"), (Machine::Arm, "ARM")] {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), empty_library(machine)).unwrap();
            let output = Command::new("readelf").args(["-W", "-h", "-l", "-d"]).arg(file.path()).output().unwrap();
            let (text, faults) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success() && faults.is_empty(), "{text}\n{faults}");
            for part in [name, "DYN (Shared object file)", "GNU_STACK", "(HASH)", "(STRTAB)", "(SYMTAB)"] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }
}

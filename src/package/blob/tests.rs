//! Layout of weight files, and errors of damaged ones.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::PackageError;
use anec_base::Result;
use anec_mil::codec::BlobSink;
use anec_mil::{Constant, Content, Data, TensorType};

fn quiet(_: WriteProgress) {}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

fn ty(dtype: DataType, elements: u64) -> TensorType {
    TensorType::new(dtype, [elements])
}

fn literal(dtype: DataType, elements: u64, fill: u8) -> Constant {
    let ty = ty(dtype, elements);
    let length = ty.bytes().unwrap() as usize;
    Constant::literal(ty, vec![fill; length])
}

fn place(plan: &mut WeightPlan, constant: &Constant) -> u64 {
    plan.place(constant, "op `w`").unwrap().offset
}

/// Content computed from offsets that counts its reads.
#[derive(Default)]
struct Pattern {
    length: u64,
    granule: u64,
    seed: u64,
    in_flight: AtomicU64,
    most: AtomicU64,
    fail_at: Option<u64>,
}

impl Content for Pattern {
    fn length(&self) -> u64 {
        self.length
    }
    fn granule(&self) -> u64 {
        self.granule
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        assert_eq!(offset % self.granule, 0, "reads begin at granules");
        let end = offset + out.len() as u64;
        assert!(end == self.length || end.is_multiple_of(self.granule), "reads end at granules or at the end");
        if self.fail_at.is_some_and(|at| (offset..end).contains(&at)) {
            return Err(PackageError::Program { problem: "a NaN at row 3".into() }.into());
        }
        let now = self.in_flight.fetch_add(out.len() as u64, Ordering::SeqCst) + out.len() as u64;
        self.most.fetch_max(now, Ordering::SeqCst);
        for (i, byte) in out.iter_mut().enumerate() {
            *byte = ((offset + i as u64).wrapping_mul(0x9e37_79b9) >> 13) as u8 ^ self.seed as u8;
        }
        self.in_flight.fetch_sub(out.len() as u64, Ordering::SeqCst);
        Ok(())
    }
}

fn pattern(length: u64, granule: u64, seed: u64) -> Arc<Pattern> {
    Arc::new(Pattern { length, granule, seed, ..Default::default() })
}

fn content(content: &Arc<Pattern>) -> Constant {
    Constant::content(ty(DataType::Uint8, content.length), content.clone())
}

#[test]
fn bytes_are_as_the_format_has_them() {
    let mut plan = WeightPlan::new();
    let first = place(&mut plan, &Constant::literal(ty(DataType::Fp16, 3), [1, 2, 3, 4, 5, 6]));
    // 11 elements of 3 bits: 33 bits, 7 unused in the fifth byte
    let second = place(&mut plan, &literal(DataType::Uint3, 11, 0xab));
    assert_eq!((first, second), (64, 192));
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("weight.bin");
    let digest = plan.write(&path, &quiet).unwrap();
    let bytes = fs::read(&path).unwrap();

    let mut expected = Vec::new();
    let mut line = |start: &[u8]| {
        expected.extend_from_slice(start);
        expected.resize(expected.len().next_multiple_of(64), 0);
    };
    line(&[2, 0, 0, 0, 2, 0, 0, 0]);
    line(&[0xef, 0xbe, 0xad, 0xde, 1, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 128]);
    line(&[1, 2, 3, 4, 5, 6]);
    let mut record = vec![0xef, 0xbe, 0xad, 0xde, 12, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 7];
    record.resize(64, 0);
    line(&record);
    expected.extend_from_slice(&[0xab; 5]);
    assert_eq!(bytes, expected);
    assert_eq!(plan.size(), bytes.len() as u64);
    assert_eq!(digest, blake3::hash(&bytes));
}

#[test]
fn equal_data_has_one_place() {
    let mut plan = WeightPlan::new();
    let shared = pattern(100, 1, 1);
    let a = place(&mut plan, &content(&shared));
    assert_eq!(place(&mut plan, &content(&shared)), a);
    assert_ne!(place(&mut plan, &content(&pattern(100, 1, 1))), a, "equal bytes of unknown origin");
    let b = place(&mut plan, &literal(DataType::Int8, 20, 3));
    assert_eq!(place(&mut plan, &literal(DataType::Int8, 20, 3)), b);
    assert_ne!(place(&mut plan, &literal(DataType::Uint8, 20, 3)), b, "another type has another record");
    assert_eq!(plan.records().len(), 4);
    let error = plan.place(&Constant::string("x"), "op `s`").unwrap_err();
    assert_eq!(error.to_string(), "program: op `s`: string can't be in a weight file");
}

#[test]
fn many_threads_write_what_one_does_in_bounded_memory() {
    let room = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    for threads in [1, 3] {
        // rows of 1000 bytes, a large granule, an odd length, and an empty content
        let contents = [pattern(40_000_000, 1000, 1), pattern(30_000_001, 10_000_000, 2), pattern(77, 1, 3)];
        let mut plan = WeightPlan::new();
        for one in &contents {
            place(&mut plan, &content(one));
            place(&mut plan, &literal(DataType::Fp32, 10 + one.seed, one.seed as u8));
        }
        let path = room.path().join(format!("{threads}.bin"));
        let written = AtomicU64::new(0);
        let progress = |p: WriteProgress| match p {
            WriteProgress::Written(bytes) => drop(written.fetch_add(bytes, Ordering::Relaxed)),
            WriteProgress::Prepared(_) => panic!("nothing is prepared here"),
        };
        let digest = pool(threads).install(|| plan.write(&path, &progress)).unwrap();
        assert_eq!(written.into_inner(), plan.records().map(|r| r.length).sum::<u64>());
        let most = contents[0].most.load(Ordering::SeqCst);
        assert!(most <= threads as u64 * (4 << 20), "{most} bytes at a time with {threads} threads");
        let most = contents[1].most.load(Ordering::SeqCst);
        assert!((10_000_000..=10_000_000 * threads as u64).contains(&most), "granules are kept whole: {most}");
        files.push((fs::read(&path).unwrap(), digest));
    }
    assert!(files[0] == files[1]);
    assert_eq!(files[0].1, blake3::hash(&files[0].0));
}

#[test]
fn content_errors_name_the_constant() {
    let room = tempfile::tempdir().unwrap();
    for threads in [1, 2] {
        let mut plan = WeightPlan::new();
        place(&mut plan, &content(&pattern(20 << 20, 64, 0)));
        let bad = Arc::new(Pattern { length: 30 << 20, granule: 64, fail_at: Some(17 << 20), ..Default::default() });
        plan.place(&content(&bad), "function `main`, op `lm_head`").unwrap();
        let path = room.path().join(format!("{threads}"));
        let error = pool(threads).install(|| plan.write(&path, &quiet)).unwrap_err();
        assert_eq!(error.to_string(), "function `main`, op `lm_head`: program: a NaN at row 3");
    }
    let path = room.path().join("missing/weight.bin");
    let error = WeightPlan::new().write(&path, &quiet).unwrap_err();
    assert_eq!(error.fault(), anec_base::Fault::Platform);
    assert!(error.to_string().contains("can't create the weight file"), "{error}");
}

#[test]
fn a_panic_of_a_content_does_not_hang() {
    struct Panics;
    impl Content for Panics {
        fn length(&self) -> u64 {
            50_000_000
        }
        fn granule(&self) -> u64 {
            1
        }
        fn read(&self, _: u64, _: &mut [u8]) -> Result<()> {
            panic!("this panic is part of a test")
        }
    }
    let room = tempfile::tempdir().unwrap();
    let mut plan = WeightPlan::new();
    place(&mut plan, &Constant::content(ty(DataType::Uint8, 50_000_000), Arc::new(Panics)));
    let write = || plan.write(&room.path().join("w"), &quiet).map(drop);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(write)).is_err());
}

/// Returns a file with one blob of each type, and where they are.
fn sample(path: &Path) -> Vec<(u64, TensorType)> {
    let mut plan = WeightPlan::new();
    let placed = CODES
        .iter()
        .map(|(dtype, code)| {
            let constant = literal(*dtype, 13, *code as u8);
            (place(&mut plan, &constant), constant.ty)
        })
        .collect();
    plan.write(path, &quiet).unwrap();
    placed
}

#[test]
fn every_type_is_read_back() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("weight.bin");
    let placed = sample(&path);
    let file = WeightFile::open(&path).unwrap();
    let records = file.records().unwrap();
    assert_eq!((file.count() as usize, records.len()), (placed.len(), placed.len()));
    for ((offset, ty), record) in placed.iter().zip(records) {
        assert_eq!((record.offset, record.dtype, record.length), (*offset, ty.dtype, ty.bytes().unwrap()));
        let Data::Literal(bytes) = file.load(*offset, ty, "op `w`").unwrap() else { panic!("small data is a literal") };
        assert!(bytes.iter().all(|b| u32::from(*b) == code(ty.dtype).unwrap()));
        let Data::Literal(again) = file.load(*offset, ty, "op `v`").unwrap() else { panic!() };
        assert!(Arc::ptr_eq(&bytes, &again), "equal places give the same object");
    }
}

#[test]
fn large_data_stays_in_the_map() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("weight.bin");
    let original = pattern(1 << 20, 1, 9);
    let mut plan = WeightPlan::new();
    let offset = place(&mut plan, &content(&original));
    plan.write(&path, &quiet).unwrap();
    let file = WeightFile::open(&path).unwrap();
    let Data::Content(mapped) = file.load(offset, &ty(DataType::Uint8, 1 << 20), "op `w`").unwrap() else { panic!() };
    let (mut expected, mut found) = (vec![0; 5000], vec![0; 5000]);
    original.read(100, &mut expected).unwrap();
    mapped.read(100, &mut found).unwrap();
    assert_eq!(found, expected);
    assert!(mapped.read(1 << 20, &mut found).is_err());
    assert!(mapped.read(u64::MAX, &mut found).is_err());
}

#[test]
fn damage_is_named() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("weight.bin");
    let placed = sample(&path);
    let whole = fs::read(&path).unwrap();
    let (offset, ty) = (placed[0].0, placed[0].1.clone());
    let at = offset as usize;
    let load = |offset: u64, ty: &TensorType| match WeightFile::open(&path) {
        Ok(file) => match file.load(offset, ty, "op `w`") {
            Ok(_) => "fine".to_owned(),
            Err(e) => e.to_string(),
        },
        Err(e) => e.to_string(),
    };
    let damaged = |place: usize, bytes: &[u8]| {
        let mut copy = whole.clone();
        copy[place..place + bytes.len()].copy_from_slice(bytes);
        fs::write(&path, copy).unwrap();
        load(offset, &ty)
    };
    let length = whole.len() as u64;
    for (place, bytes, expected) in [
        (0, &u32::MAX.to_le_bytes()[..], "the header counts 4294967295 blobs"),
        (4, &1u32.to_le_bytes()[..], "weight file of version 1, expected 2"),
        (at, &[0][..], "it starts with 0xdeadbe00, expected 0xdeadbeef"),
        (at + 4, &[99][..], "data type code 99 is not known"),
        (at + 4, &[2][..], "it holds fp32, expected tensor<fp16, [13]>"),
        (at + 8, &[25][..], "it holds 25 bytes with 0 bits of padding, tensor<fp16, [13]> takes 26 with 0"),
        (at + 8, &u64::MAX.to_le_bytes()[..], "are out of the file"),
        (at + 16, &0u64.to_le_bytes()[..], "its data is at 0, expected 128"),
        (at + 16, &(offset + 65).to_le_bytes()[..], "its data is at 129, expected 128"),
        (at + 16, &length.next_multiple_of(64).to_le_bytes()[..], "are out of the file"),
        (at + 16, &(u64::MAX - 63).to_le_bytes()[..], "are out of the file"),
        (at + 24, &[1][..], "1 bits of padding for fp16"),
        (at + 24, &[8][..], "8 bits of padding for fp16"),
    ] {
        let found = damaged(place, bytes);
        assert!(found.contains(expected), "{found} should say {expected}");
    }
    fs::write(&path, &whole).unwrap();
    for (wrong, expected) in [
        (0, "no record can be there"),
        (offset - 1, "no record can be there"),
        (offset + 64, "no record is there"),
        (u64::MAX - 63, "no record can be there"),
        (length.next_multiple_of(64), "no record can be there"),
    ] {
        let found = load(wrong, &ty);
        assert!(found.contains(expected), "{found} should say {expected}");
    }
    let unknown = TensorType::new(DataType::Fp16, [anec_mil::Dim::Unknown]);
    assert!(load(offset, &unknown).contains("has no fixed size"));
    for cut in (0..64).chain([64, 100, 128, 130, whole.len() - 1]) {
        fs::write(&path, &whole[..cut]).unwrap();
        let last = placed.last().unwrap();
        assert_ne!(load(last.0, &last.1), "fine", "cut at {cut}");
        let walked = WeightFile::open(&path).map(|file| file.records());
        assert!(!matches!(walked, Ok(Ok(_))), "cut at {cut}");
    }
}

#[test]
fn overlapping_blobs_are_refused() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("weight.bin");
    let placed = sample(&path);
    let mut bytes = fs::read(&path).unwrap();
    // the second record claims the data of the third
    let (second, third) = (&placed[1], &placed[2]);
    let at = second.0 as usize + 16;
    bytes[at..at + 8].copy_from_slice(&(third.0 + 64).to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    let file = WeightFile::open(&path).unwrap();
    file.load(third.0, &third.1, "op `a`").unwrap();
    let error = file.load(second.0, &second.1, "op `b`").err().unwrap().to_string();
    assert!(error.contains("overlap another blob's") && error.contains("op `b`"), "{error}");
    assert!(file.records().is_err());
}

#[test]
fn no_damage_panics() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("weight.bin");
    let placed = sample(&path);
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        damaged[at / 3] ^= 0x80;
        fs::write(&path, &damaged).unwrap();
        let Ok(file) = WeightFile::open(&path) else { continue };
        let _ = file.records();
        for (offset, ty) in &placed {
            let _ = file.load(*offset, ty, "op `w`");
        }
    }
}

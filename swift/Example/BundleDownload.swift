// Downloads a bundle file by file. What was broken off goes on where it was: a file that is there in its full size isn't asked for
// again, and the rest of a part is asked for by its range. Digests are those of bundle.json, whichever function made them.

import Anec
import Foundation

#if canImport(FoundationNetworking)
import FoundationNetworking
#endif

struct BundleDownload: Sendable {
    /// Where the files are, for example https://huggingface.co/OWNER/NAME/resolve/main
    let source: URL
    let folder: URL

    private struct Description: Decodable {
        struct File: Decodable {
            let file: String
            let bytes: UInt64
            /// With the name of its function.
            let digest: String?
            /// In place of `digest` up to schema version 2.
            let sha256: String?
        }
        struct Package: Decodable {
            let files: [File]
        }
        struct Host: Decodable {
            let file: File
        }
        let packages: [Package]
        let host: Host
        let tokenizer_files: [File]?
    }

    enum Problem: LocalizedError {
        case refused(String, Int)
        case damaged(String)

        var errorDescription: String? {
            switch self {
            case .refused(let file, let code): "\(file): the server answered \(code)"
            case .damaged(let file): "\(file) isn't what bundle.json says: it was removed, try again"
            }
        }
    }

    /// Downloads what is missing, and says which share is there. bundle.json comes last: with it, the bundle is whole.
    func run(progress: @Sendable (Double) -> Void) async throws {
        let whole = folder.appendingPathComponent("bundle.json")
        if FileManager.default.fileExists(atPath: whole.path) { return }
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        let text = try await data(of: "bundle.json", from: 0)
        let description = try JSONDecoder().decode(Description.self, from: text)
        let files = description.packages.flatMap(\.files) + [description.host.file] + (description.tokenizer_files ?? [])
        let total = files.reduce(0) { $0 + $1.bytes }
        var done: UInt64 = 0
        for file in files {
            // what a stranger wrote names no place outside of the folder
            guard !file.file.hasPrefix("/"), !file.file.split(separator: "/").contains("..") else {
                throw Problem.damaged(file.file)
            }
            try await fetch(file)
            done += file.bytes
            progress(Double(done) / Double(max(total, 1)))
        }
        try text.write(to: whole, options: .atomic)
    }

    private func fetch(_ file: Description.File) async throws {
        let path = file.file
        let target = folder.appendingPathComponent(path)
        let part = target.appendingPathExtension("part")
        if size(of: target) == file.bytes { return }
        try FileManager.default.createDirectory(at: target.deletingLastPathComponent(), withIntermediateDirectories: true)
        if size(of: part) == nil { _ = FileManager.default.createFile(atPath: part.path, contents: nil) }
        let handle = try FileHandle(forWritingTo: part)
        defer { try? handle.close() }
        // in pieces, so that memory is bounded and little is lost
        var position = try handle.seekToEnd()
        while position < file.bytes {
            let piece = try await data(of: path, from: position, to: min(position + 8_000_000, file.bytes))
            try handle.write(contentsOf: piece)
            position += UInt64(piece.count)
        }
        guard position == file.bytes, let digest = file.digest ?? file.sha256, try fileHasDigest(path: part.path, digest: digest) else {
            try? FileManager.default.removeItem(at: part)
            throw Problem.damaged(path)
        }
        try FileManager.default.moveItem(at: part, to: target)
    }

    private func data(of path: String, from first: UInt64, to end: UInt64? = nil) async throws -> Data {
        var request = URLRequest(url: source.appendingPathComponent(path))
        if let end { request.setValue("bytes=\(first)-\(end - 1)", forHTTPHeaderField: "Range") }
        let (data, response) = try await URLSession.shared.data(for: request)
        let code = (response as? HTTPURLResponse)?.statusCode ?? 0
        // a server that gives all of a file for a part of it would write it twice
        guard code == (end == nil ? 200 : 206), !data.isEmpty else { throw Problem.refused(path, code) }
        return data
    }

    private func size(of file: URL) -> UInt64? {
        (try? FileManager.default.attributesOfItem(atPath: file.path)[.size]) as? UInt64
    }
}

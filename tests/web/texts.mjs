// Encodes and decodes in Node: JSON on standard input, {package, folders: [{folder, texts, ids, chats}]}, and on
// standard output a list of {texts, decoded, chats}, of ids, of texts, and of ids or {error}; {error} of a folder.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const asked = JSON.parse(readFileSync(0, "utf8"));
const { FetchedFolder, Text } = await import(pathToFileURL(`${asked.package}/index.js`));
const tried = async (work) => {
  try {
    return await work();
  } catch (error) {
    if (error.name !== "EdgespecError") throw error;
    return { error: error.message };
  }
};
const found = [];
for (const { folder, texts = [], ids = [], chats = [] } of asked.folders)
  found.push(
    await tried(async () => {
      const text = await Text.load(new FetchedFolder(pathToFileURL(folder)));
      return {
        texts: texts.map((one) => text.encode(one)),
        decoded: ids.map((one) => text.decode(one)),
        chats: await Promise.all(chats.map(({ messages, ...more }) => tried(() => text.chat(messages, more)))),
      };
    }),
  );
process.stdout.write(JSON.stringify(found));
